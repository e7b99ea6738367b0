"""Memory that the ranks of a node share, and what travels through it: mailboxes, and arrays to be added."""
