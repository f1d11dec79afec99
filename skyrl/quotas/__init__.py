"""What a tenant may use: limits, and the tokens and samples of each tenant as an API process counts them."""
