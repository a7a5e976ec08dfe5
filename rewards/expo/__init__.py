"""EXPO-SQL: clauses, differences of results, attribution, clause-level reward."""
