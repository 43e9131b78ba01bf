"""The search for plans of several stages: from estimates to solved, scheduled and simulated stages."""
