"""The memory and time that a run will take, before it starts, and a configuration that is chosen by them.

What counts bytes and seconds is plain Python; torch is imported where a model is traced on its meta device.
"""
