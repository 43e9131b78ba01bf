"""The search for plans of one stage."""
