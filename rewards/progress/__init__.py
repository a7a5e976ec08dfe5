"""Progress-SQL: trees, diagnosis, progressive reward."""
