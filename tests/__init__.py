"""The tests of celery_claim; see tests/README.md for the kinds of test and the fixtures they share."""
