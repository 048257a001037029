"""Services written as classes: their contract from type hints, their handles, and their methods behind the edge."""
