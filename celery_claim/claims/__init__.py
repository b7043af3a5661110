"""Rows of a claim-shaped table change hands: claim -> renew -> write back, and recover what a dead owner held."""
