"""What the examples share: data, command line, training, pictures."""
