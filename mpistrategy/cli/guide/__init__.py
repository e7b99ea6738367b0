"""The pages of the user guide come here, as Markdown files."""
