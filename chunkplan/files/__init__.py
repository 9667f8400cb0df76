"""Files and folders that are written whole or not at all, locked meanwhile, and read whoever wrote them."""
