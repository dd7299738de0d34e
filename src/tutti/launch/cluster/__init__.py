"""Jobs on clusters: `tutti launch` writes and submits them."""
