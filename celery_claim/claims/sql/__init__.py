"""The SQL of claims: columns, statements, and what the catalogue says of a table."""
