"""From run directories to one HTML page: records, statistics, figures."""
