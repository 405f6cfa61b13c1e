"""Drafters guess tokens ahead, verification keeps the output what it would be without them. For any executor."""
