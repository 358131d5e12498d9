"""The sharding core: the only folder that talks to other ranks and owns streams. Imports point down in its floors."""
