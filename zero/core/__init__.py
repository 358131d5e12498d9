"""The sharding core: how parameters and gradients move between ranks. Imports point down in its floors."""
