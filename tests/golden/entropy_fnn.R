# Make entropy_fnn.json with FNN::entropy: Kozachenko-Leonenko estimates, Euclidean norm, nats, k = 1..5.
# Vectors are mapped to uncorrelated coordinates of variance 1 first, and the log-determinant of the map is added.
# The samples are written with 17 digits into the same file, so that both programs read the same numbers.
# Run: Rscript tests/golden/entropy_fnn.R tests/golden/entropy_fnn.json
suppressMessages(library(FNN))
set.seed(20260101)
number <- function(v) {  # null: minus infinity
  v <- as.numeric(v)
  paste0("[", paste(ifelse(is.finite(v), formatC(v, digits = 17, format = "g", width = 1), "null"), collapse = ", "), "]")
}
entropies <- function(x) {
  root <- if (ncol(x) > 1) chol(cov(x)) else diag(1)
  entropy(x %*% solve(root), k = 5) + sum(log(diag(root)))
}
case <- function(name, x) {
  x <- as.matrix(x)
  rows <- apply(x, 1, number)
  sprintf('  {"name": "%s", "x": [%s],\n   "entropy": %s}', name, paste(rows, collapse = ", "), number(entropies(x)))
}
two_peaks <- c(rnorm(30, 0, 0.1), rnorm(30, 5, 1))
cases <- c(
  case("normal", rnorm(100)), case("exponential", rexp(80, 2)), case("two peaks", two_peaks),
  case("least sample", rnorm(6)), case("pairs", c(rep(1:3, each = 2), 10 + cumsum(runif(20)))),
  case("normal, 2 features", matrix(rnorm(120), ncol = 2)), case("uniform, 5 features", matrix(runif(250), ncol = 5))
)
versions <- sprintf('{"R": "%s", "FNN": "%s"}', getRversion(), packageVersion("FNN"))
writeLines(c('{"method": "FNN::entropy(x, k = 5)", "seed": 20260101, "tolerance": 1e-10,', paste0('"versions": ', versions, ','),
             '"cases": [', paste(cases, collapse = ",\n"), "]}"), commandArgs(trailingOnly = TRUE)[1])
