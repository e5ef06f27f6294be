"""Questions that measurements answer, one file each."""
