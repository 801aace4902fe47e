"""The report as one self-contained page: markup, pictures, tables and the explorer; no framework, nothing fetched."""
