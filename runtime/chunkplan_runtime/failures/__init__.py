"""Who died, hangs or is suspended, and how all end with one message."""
