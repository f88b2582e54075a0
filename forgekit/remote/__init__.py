"""What is behind URLs: objects that are read and written with patience, and blocks kept here."""
