"""Memory of training, whole and by its parts."""
