"""Token files become rows of one length: packed documents, or windows."""
