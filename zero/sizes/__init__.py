"""How much memory a run will take, before it starts; and a configuration that is chosen by it.

`shape.py` and `cost.py` are plain values without torch; by `recorder.py` a model runs on the meta device.
"""
