"""What a run folder tells, for people: a page of HTML, and a table in the terminal."""
