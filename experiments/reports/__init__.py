"""Reports: reading of run directories, comparison over seeds, and an HTML page, figures and tables."""
