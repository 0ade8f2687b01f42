# Golden numbers for the pooled many-to-one comparisons, from R's multcomp on a two-way layout without interaction.
#   Rscript tests/golden/dunnett.R tests/golden/dunnett.json
# The data are drawn here and kept with the numbers. "unbalanced" leaves cells out, so that correlations differ.
suppressMessages({library(multcomp); library(jsonlite)})
out <- commandArgs(trailingOnly = TRUE)[1]
RNGkind("Mersenne-Twister", "Inversion", "Rejection")
fine <- GenzBretz(maxpts = 2e5, abseps = 1e-7)

# Simultaneous quantile as multcomp takes it, but from a probability that is drawn finer and always alike.
quantile_of <- function(test, level) {
  corr <- cov2cor(vcov(test))
  missed <- function(q) {
    set.seed(1)
    pmvt(rep(-q, nrow(corr)), rep(q, nrow(corr)), df = test$df, corr = corr, algorithm = fine) - level
  }
  if (nrow(corr) == 1) qt(.5 + level / 2, test$df) else uniroot(missed, c(1, 20), tol = 1e-6)$root
}

case <- function(name, seed, methods, seeds, drop = integer(0), level = .95) {
  set.seed(seed)
  d <- expand.grid(method = paste0("m", seq_len(methods) - 1), seed = seq_len(seeds), stringsAsFactors = FALSE)
  place <- match(d$method, unique(d$method))
  d$accuracy <- .7 + .006 * (place - 1) + rnorm(seeds, 0, .05)[d$seed] + rnorm(nrow(d), 0, .01)
  if (length(drop)) d <- d[-drop, ]
  d$method <- factor(d$method, unique(d$method))
  fit <- lm(accuracy ~ method + factor(seed), d)
  test <- glht(fit, linfct = mcp(method = "Dunnett"))
  set.seed(1)
  found <- summary(test, test = adjusted("single-step", maxpts = 2e5, abseps = 1e-7))$test
  bounds <- confint(test, level = level, calpha = quantile_of(test, level))$confint
  list(
    name = name, level = level, tolerance = 5e-4,  # of what is drawn
    data = list(method = as.character(d$method), seed = d$seed, accuracy = d$accuracy),
    estimate = unname(found$coefficients), std_error = unname(found$sigma), df = fit$df.residual,
    p_value = as.numeric(found$pvalues), low = unname(bounds[, "lwr"]), high = unname(bounds[, "upr"])
  )
}

write_json(list(
  versions = list(R = R.version.string, multcomp = as.character(packageVersion("multcomp")),
                  mvtnorm = as.character(packageVersion("mvtnorm"))),
  cases = list(
    case("balanced", 1, 4, 5), case("two seeds, twelve methods", 2, 12, 2), case("two methods", 3, 2, 4),
    case("level 0.9", 4, 4, 3, level = .9), case("unbalanced", 5, 4, 5, c(6, 16))
  )
), out, digits = NA, auto_unbox = TRUE)
