"""The launcher on one host: its plan, its ranks, and the rendezvous with the other hosts."""
