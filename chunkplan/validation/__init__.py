"""Every invariant of the files by name, checked by code of its own."""
