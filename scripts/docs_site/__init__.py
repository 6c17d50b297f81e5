"""The site of the documentation: what MkDocs does not do by itself, and what it is built with."""
