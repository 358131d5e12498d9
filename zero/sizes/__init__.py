"""How much memory a run will take, before it starts; and a configuration that is chosen by it. No torch in here."""
