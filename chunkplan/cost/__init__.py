"""What a chunk costs."""
