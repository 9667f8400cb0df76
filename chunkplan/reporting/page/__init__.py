"""A plan, or an analysis, as one self-contained HTML page."""
