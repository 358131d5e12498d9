"""The sharding core: parameters and gradients between ranks, and when they go. Imports point down in its floors."""
