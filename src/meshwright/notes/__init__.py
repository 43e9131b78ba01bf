"""What a finished plan says of itself: a note for each thing that its user would want to know, or could change."""
