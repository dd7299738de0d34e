"""What writes the generated pages, one file for a kind of page."""
