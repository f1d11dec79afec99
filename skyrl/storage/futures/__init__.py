"""Requests from their arrival to their outcome: recorded once, waited for, settled, and told to other processes."""
