"""Results in; tables, pictures and a page out."""
