"""Plans, predictions and measurements made readable; shows the numbers it is given and computes none."""
