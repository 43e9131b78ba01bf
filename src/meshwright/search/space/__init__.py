"""The space of plans: choices as data, what each takes and holds, and their neighbours."""
