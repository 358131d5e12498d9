"""The command lines, as they are parsed; nothing is looked at yet."""
