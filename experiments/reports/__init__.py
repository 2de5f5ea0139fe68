"""Reports: read a directory of runs, compare them over seeds, and write an HTML page, figures and a CSV file."""
