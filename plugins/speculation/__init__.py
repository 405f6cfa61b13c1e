"""`octavo verify speculation`: answers with a drafter are those without it."""
