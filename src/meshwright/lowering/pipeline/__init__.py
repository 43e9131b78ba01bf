"""A plan of several stages as local programs of its stages: the core, the update around it, and what they hold."""
