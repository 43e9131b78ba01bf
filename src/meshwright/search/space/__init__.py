"""The space of plans: choices as data, their prices and their neighbours."""
