"""The sharding core: the only folder that talks to other ranks. Imports run mesh < comm < unit < hooks < wrap."""
