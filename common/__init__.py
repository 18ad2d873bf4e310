"""What the scripts share that is not the algorithm."""
