"""``forgekit report``: what a run leaves behind, as one page that opens anywhere."""
