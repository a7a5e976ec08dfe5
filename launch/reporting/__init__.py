"""What runs and evaluations record of their episodes, and the page that shows it."""
