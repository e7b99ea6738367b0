"""The user guide: Markdown files, one page a topic, and the command that shows them without a network."""
