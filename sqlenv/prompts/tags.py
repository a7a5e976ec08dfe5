"""What the diagnostic tags say to the model: one neutral sentence each, the gold never named."""

TAG_SENTENCES = {
    "JOIN_MISSING": "The question needs more joins than the query has.",
    "JOIN_KEY_MISMATCH": "The columns that join the tables differ from the expected ones.",
    "FROM_OR_JOIN_TABLE_MISMATCH": (
        "The tables in FROM and JOIN differ from the expected ones: some are missing, "
        "redundant or wrong."
    ),
    "WHERE_ERROR": "The filter conditions in WHERE differ from the expected ones.",
    "SELECT_ERROR": "The selected columns or expressions differ from the expected ones.",
    "AGGREGATE_ERROR": "An aggregate function is missing, or is used where none belongs.",
    "GROUP_BY_MISSING": "The rows need to be grouped, and the query has no GROUP BY.",
    "GROUP_BY_ERROR": "The grouping columns differ from the expected ones.",
    "ORDER_BY_MISMATCH": "The ordering, its direction or the limit differs from what is expected.",
    "DISTINCT_MISMATCH": "Duplicate rows are treated differently from what is expected.",
    "SUBQUERY_MISSING": "A nested query, common table expression or set operation is missing.",
    "EXTRA_SUBQUERY_OR_CTE": (
        "A nested query, common table expression or set operation is not needed."
    ),
}
