"""Which chunk runs when on a rank's pipeline, and how long that takes."""
