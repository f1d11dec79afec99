"""Quotas of tenants: limits, and the tokens and samples that an API process counts for each tenant."""
